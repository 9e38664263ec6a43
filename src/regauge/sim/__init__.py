"""Workers, network and clients on a manual clock, driving the same `route` objects as the gateway does. Whatever comes of it is simulated."""
