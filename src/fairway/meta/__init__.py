"""The meta server: which broker group carries which subject, and who answers for it."""
