"""Guidance methods: the logits under the prompt are combined with those under another prompt."""
