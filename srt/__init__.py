"""The ground the processes stand on: messages, plans, configuration, sockets, HTTP, the model."""
