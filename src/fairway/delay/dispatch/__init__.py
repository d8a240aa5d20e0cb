"""How due messages reach the brokers: the dispatch half of a delay server.

    dispatcher   groups due messages into intents: one batch, one target, one producer stream each
    log          the dispatch log: every decision about pending messages, in one order
    sender       sends intents to the broker groups, each stream in order, with retries
    targets      in a cluster: asks the meta servers which broker groups take a subject, and where they are

The dispatcher turns due index rows into intents and appends them to the dispatch log. Once an intent is synced, the
engine hands the intent to the sender. The broker's receipt becomes a SENT event in the dispatch log.
"""
