"""The steps of a plan, one after the other: what both the training process and the data process run.

(To be written.) The form that ``loader.py`` and ``service/`` rely on:

    engine = Engine(plan, feeds, shares)   # feeds: {(source, lane): Feed}; shares: the data-parallel
                                           # indices whose rows are wanted on this node
    engine.seek(state)                     # PlanState: state *before* the next step
    step = engine.next()                   # Step(number, rows={share: Batch}, state=PlanState after)
    engine.close()

``Batch``: dict of name → numpy array of this share's rows, C-contiguous, shapes [batch, pack]; the
constructor writes into arrays that ``allocate(name, shape, dtype)`` returns, so that the data
process lets it write straight into shared memory.
"""
