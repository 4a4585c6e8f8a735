"""The layers below the endpoints: server, connections, bodies, event streams."""
