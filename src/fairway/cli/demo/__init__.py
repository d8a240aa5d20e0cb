"""The demonstrations: `fairway demo`, `fairway demo cluster`, `fairway demo log`."""
