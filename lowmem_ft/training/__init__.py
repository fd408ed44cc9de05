"""The step and the loop around it: loss, optimizer, evaluation, saved state."""
