"""flashtile behind the switches of other libraries. Nothing is changed until a ``register()`` is called."""
