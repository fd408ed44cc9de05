"""What the user sees while a run goes on, and after."""
