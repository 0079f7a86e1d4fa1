# Exact 64-bit numbers, infinities, bytes that are no UTF-8.
cd "$FIXTURES/gguf" && sluice info --json every_type.gguf
