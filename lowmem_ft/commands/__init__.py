"""The commands of `lowmem-ft`: each module adds its own to the parser, and imports what is heavy when it runs."""
