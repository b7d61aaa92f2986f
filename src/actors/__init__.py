"""Who owns what: the actor runtime, and the engine, slot, cache, root and device actors."""
