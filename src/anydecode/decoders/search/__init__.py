"""Search methods: several candidate continuations are compared, and one is emitted."""
