"""Careers."""
