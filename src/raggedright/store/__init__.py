"""Session stores: agents append sessions, ranks read their rows. One interface, three backends."""
