package httplimit

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Proxies are those between the clients and this server. Set one of the fields.
type Proxies struct {
	// Trusted are the proxies' addresses. Prefer it to Count: it cannot be off by one, and who goes around
	// the proxies gains nothing. See [ParseProxies].
	Trusted []netip.Prefix
	// Count is how many proxies every request passes, for when their addresses are not known: 1 for a load
	// balancer alone, 2 for a CDN in front of it. Too low, and all clients are one, the outermost proxy;
	// too high, and a client that sends the header itself picks its address. So look at it once: the key
	// of a request that you send with a forged header must be your own address.
	Count int
}

// ParseProxies returns the proxies at the addresses and prefixes in texts: "10.0.0.0/8", "2001:db8::1".
// It returns an error that says which text is none, and when there is none at all.
func ParseProxies(texts ...string) (Proxies, error) {
	var proxies Proxies
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			address, errAddr := netip.ParseAddr(text)
			if errAddr != nil || address.Zone() != "" {
				return Proxies{}, fmt.Errorf("httplimit: proxy %.80q: use an address, or a prefix such as 10.0.0.0/8", text)
			}
			prefix = netip.PrefixFrom(address, address.BitLen())
		}
		proxies.Trusted = append(proxies.Trusted, prefix)
	}
	if err := proxies.validate(); err != nil {
		return Proxies{}, fmt.Errorf("httplimit: %w", err)
	}
	return proxies, nil
}

func (p Proxies) validate() error {
	switch {
	case p.Count < 0:
		return fmt.Errorf("Proxies.Count is %d; use 1 or more", p.Count)
	case p.Count > 0 && len(p.Trusted) > 0:
		return errors.New("both Proxies.Trusted and Proxies.Count are set; use one")
	case p.Count == 0 && len(p.Trusted) == 0:
		return errors.New("there are no proxies; name them in Proxies.Trusted, or give Proxies.Count")
	}
	for _, prefix := range p.Trusted {
		switch {
		case !prefix.IsValid():
			return errors.New("Proxies.Trusted has an invalid prefix")
		case foldedPrefix(prefix).Bits() == 0:
			return fmt.Errorf("Proxies.Trusted has %v, which is everybody, so that clients would choose their own address; name the proxies", prefix)
		}
	}
	return nil
}

// checked returns the proxies ready for use, and panics when they cannot be: a mistake of the program.
func (p Proxies) checked(constructor string) Proxies {
	if err := p.validate(); err != nil {
		panic("httplimit: " + constructor + ": " + err.Error())
	}
	p.Trusted = slices.Clone(p.Trusted)
	for i, prefix := range p.Trusted {
		p.Trusted[i] = foldedPrefix(prefix)
	}
	return p
}

// foldedPrefix returns prefix as one of IPv4 when all of it are IPv4 addresses mapped into IPv6, since
// addresses are compared folded.
func foldedPrefix(prefix netip.Prefix) netip.Prefix {
	const mapped = 96 // bits in front of the IPv4 address
	if address := prefix.Addr(); address.Is4In6() && prefix.Bits() >= mapped {
		return netip.PrefixFrom(address.Unmap(), prefix.Bits()-mapped)
	}
	return prefix
}

// trusts reports whether address, which is folded, is of a named proxy.
func (p Proxies) trusts(address netip.Addr) bool {
	return slices.ContainsFunc(p.Trusted, func(prefix netip.Prefix) bool { return prefix.Contains(address) })
}
