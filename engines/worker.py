"""Laid out; filled in by the room's author in a following commit."""
