"""Real crashes of a real process on a real file system: SIGKILL anywhere, power cuts where the machine allows.

streams     what is written: batches that follow from seed, producer and sequence alone
writer      the process that is killed; says what it is about to do, and what it was told is durable
ledger      what the writer said, and the judgement of what a recovery found
power       a file system whose power can be cut
residue     what a crash may leave behind and a kill rarely does: torn tails, newborn files
campaign    rounds of all that, and the counts: `python -m tests.crash.campaign`
"""
