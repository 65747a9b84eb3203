"""Token ids to text, in a process of its own."""
