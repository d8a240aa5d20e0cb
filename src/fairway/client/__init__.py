"""The client library: a blocking and an asyncio client over the sans-I/O sessions of `fairway.protocol`.

Packages

sync                  the client for programs without a loop: `fairway.connect`, consumers, forwarder, coalescing
aio                   the same for asyncio: `fairway.aio`
cluster               routes, and one connection to each broker group; shared by both clients
spool                 batches that no broker takes now wait in files, and are sent from there

Modules, shared by both clients

core                  one connection's line with its sessions, the client's options, durations, common sentences
url                   parses `fairway://` and `meta://` URLs
commands              requests beside sending and consuming, and when to repeat them
delayed_messages      due times, requests about delayed messages, and `client.delayed`
taken_messages        the settings of a consumer, and the messages that it has taken and not yet given to the program
client_log            what clients write into the log: connections, dead letters, delayed joins
action_log_reader     reads a broker's action log from afar, with the names of groups and consumers
message_states        the states of a message in a group, and which event leads to which state
app                   `fairway.App`: runs handlers until the program ends
handler_results       how the end of a handler settles its messages: `Retry`, `Reject`
idempotence           inboxes, which let an effect happen once
coalescing            merges equal requests of one process: `QueueCoordinator`
forwarder_buffer      the items of a process-forward producer, in memory and in its journal

A message that is sent: `Client.send` adds the message to the batch that `ProducerSession` fills. The link writes the
batch and reads the receipt, and the session settles the batch's outcome.

A message that is received: `ConsumerSession` pulls batches ahead of the program. The consumer takes messages from the
session in handfuls, gives them to the program, and the session sends the settlements.
"""
