"""Tests of what every server has."""
