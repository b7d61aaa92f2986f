"""Loading models, presets, chat templates and their boundaries, incremental detokenising."""
