"""Every figure that the README quotes, each one command."""
