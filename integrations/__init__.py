"""One module for each library that shmload works with; imported only when it is used."""
