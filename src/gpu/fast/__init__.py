"""Speed replacements for parts of a model, each switchable and proved equal to what it replaces."""
