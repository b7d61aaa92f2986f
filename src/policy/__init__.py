"""Pure decisions: no torch, no I/O, no clock of its own. The actors carry them out."""
