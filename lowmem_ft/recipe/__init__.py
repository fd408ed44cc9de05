"""The recipe: its settings (`schema`), reading it from YAML (`load`), and its documentation (`reference`)."""
