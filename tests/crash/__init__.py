"""Real crashes of a real process on a real file system: SIGKILL anywhere, power cuts where the machine allows.

streams     what is written: batches that follow from seed, producer and sequence alone
writer      the process that is killed; says what it is about to do, and what it was told is durable
ledger      what the writer said, and the judgement of what a recovery found
power       a file system whose power can be cut
residue     what a crash may leave behind and a kill rarely does: torn tails, newborn files

broker_server   a broker to be killed
broker_worker   a producer or a consumer of it, the same as in simulation
broker_witness  what they saw, line by line, and how the model of tests/simulation is told
broker_rounds   all of them for a while, and the judgement

clients_worker  a program that uses the public clients, sync or asyncio
clients_diary   what it saw, how little a program knows of its client, and what the model makes of it
clients_rounds  the broker and such programs, all of them killed for a while, and the judgement

delay_server    a delay server to be killed, at named places too
delay_worker    a program that schedules, cancels, reschedules; or one that takes what arrives
delay_ledger    what they were told, what arrived, and the judgement
delay_rounds    delay servers, brokers and programs for a while, killed; clocks on which days pass in between
delay_pair      the same with two copies of a delay server, in a cluster

campaign    rounds of all that, and the counts: `python -m tests.crash.campaign`
"""
