package store

func Hidden() {}
