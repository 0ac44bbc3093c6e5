"""Decides what runs next, launches it, and commits what came back."""
