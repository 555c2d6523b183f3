"""Processes and their groups: how they start, find each other, agree and end."""
