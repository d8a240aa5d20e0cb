"""Who lives, who leads, who carries what.

port        what everybody relies on          layout      what is kept in it
tree        the law of the nodes              leases      of sessions           certainty   of those who have one
watching    who wants to know                 tree_emulation  of a tree, at servers that have no watch for one
sqlite      in a file, for one meta server    zookeeper   on ZooKeeper (kazoo_line, kazoo_requests: its client)
simulated   on virtual time (sim_client)      opening     by its address
"""
