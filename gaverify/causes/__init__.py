"""Control experiments, one per file: a judged task → what was measured, as plain records."""
