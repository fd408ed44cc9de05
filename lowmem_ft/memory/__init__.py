"""Memory mechanisms, one a file, each usable alone on any Hugging Face model. None changes what is learned."""
