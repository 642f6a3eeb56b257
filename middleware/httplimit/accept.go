package httplimit

import (
	"mime"
	"strconv"
	"strings"
)

// What a refusal can be sent as, in the order of preference where the client has none.
const (
	problemJSON = "application/problem+json"
	plainText   = "text/plain"
	htmlPage    = "text/html"
)

// maxAccepted bounds how many media ranges of a request are read: a client that is refused must not buy
// much work with a long header.
const maxAccepted = 32

// negotiate returns the type that the Accept fields of a request prefer: of the highest quality, named most
// exactly. A client that accepts none of them gets JSON.
func negotiate(accept []string) string {
	best, bestQuality, bestExact := problemJSON, 0.0, 0
	ranges := strings.SplitN(strings.Join(accept, ","), ",", maxAccepted+1)
	ranges = ranges[:min(len(ranges), maxAccepted)]
	for _, offer := range []string{problemJSON, plainText, htmlPage} {
		quality, exact := qualityOf(offer, ranges)
		if quality > bestQuality || quality == bestQuality && quality > 0 && exact > bestExact {
			best, bestQuality, bestExact = offer, quality, exact
		}
	}
	return best
}

// qualityOf returns the quality of offer by the range that names it most exactly, and how exact that is: 3
// for the type itself, 2 for its family, 1 for anything, 0 for not at all.
func qualityOf(offer string, ranges []string) (quality float64, exact int) {
	for _, text := range ranges {
		media, parameters, err := mime.ParseMediaType(text)
		if err != nil {
			continue
		}
		if e := exactness(media, offer); e > exact {
			quality, exact = parseQuality(parameters), e
		}
	}
	return quality, exact
}

func exactness(media, offer string) int {
	family, _, _ := strings.Cut(offer, "/")
	switch {
	case media == offer, media == "application/json" && offer == problemJSON:
		return 3
	case media == family+"/*":
		return 2
	case media == "*/*":
		return 1
	}
	return 0
}

func parseQuality(parameters map[string]string) float64 {
	text, stated := parameters["q"]
	if !stated {
		return 1
	}
	q, err := strconv.ParseFloat(text, 64)
	if err != nil || !(q >= 0 && q <= 1) {
		return 0
	}
	return q
}
