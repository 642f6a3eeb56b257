// Package playground is a page on which people see what rate limits do: a token bucket beside a fixed window and a leaky
// bucket, under the same load, in time that runs, slows down, stands still and goes by steps. It needs no server, sends
// nothing, and asks the module of package httplimit/client for every decision, so that what it shows is what a Limiter
// decides.
//
// To serve it, mount Handler below any prefix that ends with a slash:
//
//	mux.Handle("/playground/", playground.Handler())
//
// To host it with documentation, write it as one file:
//
//	err := playground.WriteHTML(file)
//
// A link carries the example, the settings that differ from it, and the instant, all in its fragment, which no server sees.
//
// The files are in web/. simulate.js puts the requests of load.js to the limits, and presets.js has the examples: neither
// touches the page, so that a test plays the whole history of each and compares it with Go's. player.js is simulated time.
// lane.js, bucket.js and strip.js draw an instant of a history, controls.js and keys.js are what people move and press, and
// main.js holds it together. settings.js says what may be set, and reads and writes links.
package playground
