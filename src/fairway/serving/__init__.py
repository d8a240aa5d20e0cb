"""What every server has: connections and their bounds, requests with the way back, probes over HTTP."""
