"""Random programs, random slices: what is accepted computes what the program as written computes.

    program     a program as plain data, and how it is traced, sliced, run and compared
    dense       steps over rows of the batch: every operator that has a rule
    routes      a routed layer, each of its steps spelled in one of several ways
    lockstep    all ranks of a graph in one process, node by node, with their gradients
    mutations   rules broken on purpose, each of which some program has to find

`python -m tests.fuzz --programs 10000 --state fuzz.jsonl` runs long, and goes on where it stopped.
"""
