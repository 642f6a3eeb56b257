// Package tool has one function.
package main

func main() {}
