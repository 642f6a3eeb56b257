package httplimit

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/address"
)

// Proxies are those between the clients and this server. Set one of the fields.
type Proxies struct {
	// Trusted are the proxies' addresses; see [ParseProxies]. Prefer it to Count, because it can't be off by one, and
	// clients that bypass the proxies gain nothing.
	Trusted []netip.Prefix
	// Count is how many proxies every request passes, if you don't know their addresses: 1 for a load balancer alone, 2
	// for a CDN in front of it. If it's too low, all clients share the outermost proxy's bucket, and if it's too high, a
	// client that sends the header itself picks its address. So check it once: a request of yours with a forged header
	// must get your own address as its key.
	Count int
}

// ParseProxies returns the proxies at the addresses and prefixes in texts: "10.0.0.0/8", "2001:db8::1". The error names
// the invalid text, and no text at all is an error, too.
func ParseProxies(texts ...string) (Proxies, error) {
	var proxies Proxies
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			single, errAddr := netip.ParseAddr(text)
			if errAddr != nil || single.Zone() != "" {
				return Proxies{}, fmt.Errorf("httplimit: proxy %.80q: use an address, or a prefix such as 10.0.0.0/8", text)
			}
			prefix = netip.PrefixFrom(single, single.BitLen())
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
		case address.FoldPrefix(prefix).Bits() == 0:
			return fmt.Errorf("Proxies.Trusted has %v, which is everybody, so that clients would choose their own address; "+
				"name the proxies", prefix)
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
		p.Trusted[i] = address.FoldPrefix(prefix)
	}
	return p
}

// trusts reports whether an address, folded, is of a named proxy.
func (p Proxies) trusts(folded netip.Addr) bool {
	return slices.ContainsFunc(p.Trusted, func(prefix netip.Prefix) bool { return prefix.Contains(folded) })
}
