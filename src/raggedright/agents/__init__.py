"""Agents: what runs on a prompt, what is recorded of it, and what becomes of those that misbehave."""
