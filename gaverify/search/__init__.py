"""Control experiments, one per file: a judged experiment → what was measured, as plain records."""
