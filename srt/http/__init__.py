"""OpenAI-compatible and native HTTP endpoints."""
