"""What clients and servers alike ask of meta servers: routes, and the registry over the wire."""
