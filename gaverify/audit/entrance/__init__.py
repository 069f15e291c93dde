"""On PYTHONPATH while a launcher runs, so that every Python that it starts finds `sitecustomize` here."""
