"""What comes out of a run: answers to try it."""
