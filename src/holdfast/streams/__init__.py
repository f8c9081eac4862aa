"""Publishing, delivering and subscribing to logs."""
