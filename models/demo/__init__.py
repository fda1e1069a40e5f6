"""The bundled demo model: an order-desk agent small enough to train and serve on a CPU.

Owns the conversation generator, the simulated order desk, the tokenizer and chat template, the training and
evaluation scripts and the weights. Knows nothing about the engine, the cache or the server.
"""
