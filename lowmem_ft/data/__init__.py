"""From files to tokens: reading, templates, the audit and the order of examples."""
