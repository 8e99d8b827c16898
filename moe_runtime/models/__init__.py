"""Model families: one generic decoder, and one short adapter per family."""
