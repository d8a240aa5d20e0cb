"""The command line: one module for each family of verbs. `fairway.__main__` lists them.

- `arguments` has the options and arguments that several verbs share, each declared once, and reads times.
- `settings` resolves flags, environment and `fairway.toml`, and adds the options of servers to verbs.
- `connections` adds the options of verbs that ask a server, and asks brokers and meta servers.
- `output` prints tables, JSON, errors and the log of a server.
- Servers: `broker`, `delay`, `meta`, `replica_server` (one copy of a group).
- Messages: `produce`, `consume`, `dead`, `delay`, `spool`, `outbox`, `trace` (with `trace_search`, `trace_timeline`).
- Administration: `subject`, `group_admin`, `cluster`, `top`, `doctor`, `bench`, `directory`, `pipeline`.

Verbs import everything heavy when they run, so that `fairway --help` answers at once. Exit status: 0 ok, 1 failed,
2 usage, 3 unreachable, 4 found damage or imbalance.
"""
