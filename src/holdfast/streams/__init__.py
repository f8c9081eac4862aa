"""Publishing results, and delivering and subscribing to the streams of a log."""
