"""What lies below the endpoints: the server, connections, bodies, event streams."""
