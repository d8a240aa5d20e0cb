"""The parts that every server shares: sessions and their bounds, requests, memory bounds, metrics and probes.

    session            one client connection: bytes in, requests out, answers back
    session_manager    the listeners and all sessions of a server; the base of every server with a port
    read_limits        memory for frames that have arrived in part; turns for connections that send much
    requests           one request as an actor sees it, with the way back to its session; `DelayPort`
    memory_budget      bounds on memory that many holders share: `Allowance` and `Budget`
    memory_plan        divides --memory-mib between the budgets of a server; accounts for /metrics
    rates              token buckets; how fast clients may create subjects
    metrics            counters, histograms and the Prometheus text format
    http               /metrics, /livez and /readyz over HTTP

A request travels like this: `session` reads a helping of frames and passes each request to the server's `handle`. The
server calls `requests.admit`, which charges the request to the memory for waiting requests, and `requests.hand_to`,
which puts it into the mailbox of an actor. The actor's processor answers through `ServedRequest`, and the session
writes the answer.
"""
